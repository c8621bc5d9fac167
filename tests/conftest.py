"""Settings for all tests: Hypothesis profiles, chosen by the environment variable KVSTRATA_PROFILE.

`default` is short and gives the same examples in every run; `soak` is long and gives new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("KVSTRATA_PROFILE", "default"))
