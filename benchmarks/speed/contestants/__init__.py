"""One module a contestant, each run in a process of its own from the folder above, by the protocol in `_turns`.

python -m contestants.flower --workload mlp
"""

import os

# Before any framework is imported: nobody reports home while being timed.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
