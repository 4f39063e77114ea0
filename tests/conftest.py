"""Settings for every test."""

import os

# Tests run in parallel processes on few cores; a pool of threads in each of them only fights the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
