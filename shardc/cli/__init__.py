"""The command line: every command calls the API and shows what it returns.

May import everything; nothing imports it. Newcomers start at `main.py`.
"""
