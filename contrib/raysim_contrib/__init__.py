"""Plug-in of rarely used codecs, compressors and replica methods, which raysim's notation finds by entry points."""

from raysim_contrib.asyncsparta import AsyncSPARTA
from raysim_contrib.atomo import ATOMO
from raysim_contrib.daq import DAQ
from raysim_contrib.deco import DeCoSGD
from raysim_contrib.demo import DeMo
from raysim_contrib.diana import DIANA
from raysim_contrib.dilocox import DiLoCoX
from raysim_contrib.dion import Dion
from raysim_contrib.edgc import EDGC
from raysim_contrib.gtopk import GTopK
from raysim_contrib.halos import HALoS
from raysim_contrib.meanstd import MeanStd
from raysim_contrib.mpc import MPC
from raysim_contrib.muloco import MuLoCo
from raysim_contrib.outliers import Outliers
from raysim_contrib.residual_vq import ResidualVQ
from raysim_contrib.signsgd import SignSGD
from raysim_contrib.sparta import SPARTA
from raysim_contrib.streaming import StreamingDiLoCo
from raysim_contrib.tahquant import TAHQuant
from raysim_contrib.tinyscript import TinyScript
from raysim_contrib.zfp import ZFP

__all__ = [
    "ATOMO",
    "DAQ",
    "DIANA",
    "EDGC",
    "MPC",
    "SPARTA",
    "ZFP",
    "AsyncSPARTA",
    "DeCoSGD",
    "DeMo",
    "DiLoCoX",
    "Dion",
    "GTopK",
    "HALoS",
    "MeanStd",
    "MuLoCo",
    "Outliers",
    "ResidualVQ",
    "SignSGD",
    "StreamingDiLoCo",
    "TAHQuant",
    "TinyScript",
]
