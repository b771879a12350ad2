"""Preloaded into a fork server, and imported nowhere else: the server ends with the process that started it.

By itself it would stay: the processes it forked hold the pipe that it watches. They in turn are tethered to the server.
"""

import os

from bench.tether import end_with_parent

end_with_parent(os.getppid())
