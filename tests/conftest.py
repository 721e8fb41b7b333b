"""For the whole test run: hypothesis draws the same examples every time, without a clock."""

from hypothesis import settings

settings.register_profile("mxsim", deadline=None, derandomize=True, database=None, max_examples=300)
settings.load_profile("mxsim")
