"""`python -m atoll.simulation churn --seed 8171`: plays a scenario of the simulator."""

from __future__ import annotations

import sys

from atoll.simulation.scenarios import main

sys.exit(main())
