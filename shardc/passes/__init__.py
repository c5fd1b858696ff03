"""One transformation of the graph a file; `compiler.py` lists them in order."""
