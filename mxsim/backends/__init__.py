"""Backends beside the Numba one.  Every ``torch_*`` module here needs PyTorch; this one does not.

The PyTorch quantizer is written from the specification, not from the Numba code, and computes
otherwise (see ``torch_quantize``): that both agree bit for bit means something.
"""
