"""Compiled programs on disk: a second start that compiles the same takes the program that the first one left.

    key = key_of(request)         a digest of all that compiling depends on, or UncacheableError with the reason
    read(key) / write(key, ...)   a file a program, in a folder of bounded size

A wrong hit is the worst fault of a cache, so what cannot be known is not cached: `fingerprint` refuses values, and
`code` functions, whose content it cannot tell. Newcomers start at `key.py`.
"""
