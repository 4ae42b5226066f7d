"""The CPU's own kernels, in C++: products of packed weights, attention over blocks, and what lies between them.

They are compiled once on the machine that runs them, in float32, and used where a compiler is found; everywhere else
torch's operators do the same work (models/decoder.py, attention/grouped.py).

    compiler.py     sources -> a library in the user's cache
    library.py      the library's functions, with types
    products.py     a weight in panels             products.cpp
    attention.py    a step's list of work          attention.cpp
    forward.py      a decoder, layer by layer      rows.cpp (norms, rotary positions, writing keys and values)
                                                   vectors.h (what all of them are made of)
"""
