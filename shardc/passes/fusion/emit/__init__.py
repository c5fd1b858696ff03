"""Clusters become calls of kernels in the graph.

May import `fusion.clustering`. Newcomers start at `emit.py`.
"""
