"""Launches on a device: launch records, schedules of rows, register limits, tables of measured schedules.

May import `kernels_triton.base`. Newcomers start at `launch.py`.
"""
