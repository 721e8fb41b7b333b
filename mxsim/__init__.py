"""mxsim: a laboratory for training instabilities in Microscaling (MX) formats."""

from mxsim import results
from mxsim.bias import BiasReport, ProbePlan, gradient_bias
from mxsim.checkpoint import load_checkpoint, save_checkpoint
from mxsim.config import ProxyConfig
from mxsim.data import held_out, init_params, make_batches, make_teacher
from mxsim.formats import FORMATS, BlockFormat, FloatFormat, IntFormat
from mxsim.jit import check_subnormals
from mxsim.mxarray import MXArray, QuantizationStats
from mxsim.outcome import DivergenceRule
from mxsim.paired import PairedRun
from mxsim.philox import Noise
from mxsim.precision import Internals, PrecisionScheme, SiteFormat
from mxsim.presets import PRESETS, scheme
from mxsim.proxy import loss_and_grads
from mxsim.quantize import fake_quantize, quantize, round_to
from mxsim.train import Run, Training, start, train

__version__ = "0.1.0"
__all__ = [
    "FORMATS",
    "PRESETS",
    "BiasReport",
    "BlockFormat",
    "DivergenceRule",
    "FloatFormat",
    "IntFormat",
    "Internals",
    "MXArray",
    "Noise",
    "PairedRun",
    "PrecisionScheme",
    "ProbePlan",
    "ProxyConfig",
    "QuantizationStats",
    "Run",
    "SiteFormat",
    "Training",
    "check_subnormals",
    "fake_quantize",
    "gradient_bias",
    "held_out",
    "init_params",
    "load_checkpoint",
    "loss_and_grads",
    "make_batches",
    "make_teacher",
    "quantize",
    "results",
    "round_to",
    "save_checkpoint",
    "scheme",
    "start",
    "train",
]

check_subnormals()
