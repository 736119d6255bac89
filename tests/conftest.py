"""Hypothesis profiles: "quick" is what CI runs, `pytest --hypothesis-profile thorough` looks 20 times longer."""
from hypothesis import HealthCheck, settings

common = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("quick", max_examples=25, derandomize=True, **common)
settings.register_profile("thorough", max_examples=500, **common)
settings.load_profile("quick")
