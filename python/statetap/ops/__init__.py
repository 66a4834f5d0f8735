"""The recurrences as functions of tensors. Needs torch alone."""

from .delta import gated_delta_rule as gated_delta_rule
from .fla import chunk_gated_delta_rule as chunk_gated_delta_rule
from .fla import chunk_kda as chunk_kda
from .fla import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from .reference import l2norm as l2norm
from .taps import RecurrenceOutput as RecurrenceOutput
from .taps import StateWrite as StateWrite
from .taps import Taps as Taps
from .trajectory import Trajectory as Trajectory
