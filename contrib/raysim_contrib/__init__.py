"""Rarely used codecs, a plug-in of raysim: the entry points of this distribution make their names known to its notation."""

from raysim_contrib.atomo import ATOMO
from raysim_contrib.daq import DAQ
from raysim_contrib.meanstd import MeanStd
from raysim_contrib.mpc import MPC
from raysim_contrib.outliers import Outliers
from raysim_contrib.tahquant import TAHQuant
from raysim_contrib.tinyscript import TinyScript
from raysim_contrib.zfp import ZFP

__all__ = ["ATOMO", "DAQ", "MPC", "ZFP", "MeanStd", "Outliers", "TAHQuant", "TinyScript"]
