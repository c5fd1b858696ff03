"""Compiled programs on disk: a second start that compiles the same takes the program that the first one left.

    place = Place(request)
    place.find()                     traces the model; the program that lies under the key of its trace, if there is one
    place.write(compiled, ...)       a file a program, in a folder of bounded size

A wrong hit is the worst fault of a cache. So the key is made of what passes are given, and not of the code that it came
from: nobody has to know what forward may read. Newcomers start at `key.py`.
"""
