"""The CPU's own kernels, in C++: products of packed weights, attention over blocks, and what lies between them.

They compute in float32. A wheel carries them for common processors; elsewhere they are compiled once, on the machine
that runs them. Where there is no compiler either, torch's operators do the same work (models/decoder.py,
device/torch_attention.py).

    instructions.py       what they are compiled for
    compiler.py           sources -> a library in the user's cache
    prebuilt.py           sources -> libraries in a wheel
    library.py            the library's functions, with types
    structures.py         what they read in one piece
    panels.py             weights in panels              products.cpp, products.h, panel_tiles.h, formats.h
                                                         fixed_tiles.h, int8_tiles.h, byte_products.h
    attention_items.py    a step's list of work          attention.cpp, attention.h, attention_one.h, attention_many.h
    cores.py              how many threads               threads.cpp (chunks that threads share)
    cpu_layers.py         a decoder's forward pass       layers.cpp, rows.cpp (norms, rotary positions, writing
                                                         keys and values)
                                                         vectors.h (what all of them are made of)
    sampler_operators.py  the sampler's passes over rows     logits.cpp, noise.cpp
    sampler_threads.py    some of its rows on each thread
"""
