"""The planner: what a training would take on a cluster, from descriptions; starts no process."""
