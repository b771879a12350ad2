"""Preloaded into a fork server alone: importing this has the kernel end the server when the process that made it ends.

The server would stay: the processes it forked hold the pipe that it watches. They in turn end with the server.
"""

import os

from bench.node import end_with_parent

end_with_parent(os.getppid())
