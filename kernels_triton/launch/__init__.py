"""Launches on a device: launch records, schedules of rows, register limits, tables of measured schedules.

May import nothing else of `kernels_triton`. Newcomers start at `launch.py`.
"""
