"""What kernels and the compiler above them share: coded errors, the `shardc::` op library, names of dtypes, random
numbers, the places of a bucket's members, and the protocol of in-place calls.

Imports torch alone. Newcomers start at `library.py`, then `inplace.py`.
"""
