"""`python -m kvstrata.testing.simulation`: see `soak.py`."""

from __future__ import annotations

from kvstrata.testing.simulation.soak import main

raise SystemExit(main())
