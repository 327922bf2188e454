"""The agent of a node of our own Ray cluster in place of the dashboard's: it serves nothing, says so, and ends with its node.

A program without imports of any package; the node service starts it with the folder of the session (`ray_services`).
"""

import os
import sys
import time

if __name__ == "__main__":
    node_service, node = os.getppid(), os.environ["RAY_NODE_ID"]
    for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
        path = os.path.join(sys.argv[1], f"{service}_{node}")
        with open(f"{path}.new", "w") as file:  # as Ray's own agent writes it where the packages of a service are missing
            file.write("-1")
        os.rename(f"{path}.new", path)
    while os.getppid() == node_service:
        time.sleep(1.0)
