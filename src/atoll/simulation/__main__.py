"""`python -m atoll.simulation churn --seed 8171`: play a scenario of the virtual world."""

from __future__ import annotations

import sys

from atoll.simulation.scenarios import main

sys.exit(main())
