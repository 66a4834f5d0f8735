"""Tracing on nnsight: `StandardizedTransformer` and the values its blocks serve."""

from .errors import OutOfOrderError as OutOfOrderError
from .model import StandardizedTransformer as StandardizedTransformer
from .model import route_kernels as route_kernels
