"""Without a GPU, nothing here runs unless Triton was told on import to interpret."""

from hypothesis import HealthCheck, settings

from neaptide.kernels.launching import is_interpreted
from neaptide.kernels.prefix_attention.kernel import attend_kernel

settings.register_profile("interpreted", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("interpreted")

assert is_interpreted(attend_kernel), "TRITON_INTERPRET=1 must be set before anything imports Triton"
