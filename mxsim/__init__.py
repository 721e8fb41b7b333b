"""mxsim: a laboratory for training instabilities in Microscaling (MX) formats."""

from mxsim.formats import FORMATS
from mxsim.quantize import MXArray, fake_quantize, quantize, round_to

__version__ = "0.1.0"
__all__ = ["FORMATS", "MXArray", "fake_quantize", "quantize", "round_to"]
