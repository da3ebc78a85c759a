"""Dockerfiles as BuildKit reads them: text -> instructions -> stages -> what is to be done for each. No I/O but in `context`.

The words are those of `e2b-dockerfile-utils`, a port of BuildKit's parser; what the instructions mean is here. Whatever is
not supported is refused with its line: nothing is left out in silence.
"""
