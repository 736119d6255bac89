"""`pytest --hypothesis-profile thorough` looks 20 times longer than the default profile, at other examples each time."""
from hypothesis import settings

settings.register_profile("thorough", max_examples=2000, deadline=None)
