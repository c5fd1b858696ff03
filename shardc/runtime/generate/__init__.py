"""Generation: prompts in, tokens out, by prefill and decode programs that share a cache of keys and values.

May import `runtime.execute` and what is below. Newcomers start at `generator.py`.
"""
