"""What a transformers mixer calls, as a `MixerCall` in the package's standard names and layouts."""

from .attention import AttentionCall as AttentionCall
from .binding import missing as missing
from .binding import transformers_version as transformers_version
from .call import MixerCall as MixerCall
from .instrument import Hook as Hook
from .instrument import Instrumented as Instrumented
from .instrument import Mixer as Mixer
from .instrument import instrument as instrument
from .instrument import is_instrumented as is_instrumented
from .routing import route_family as route_family
from .slots import fitting as fitting
from .spec import MixerSpec as MixerSpec
