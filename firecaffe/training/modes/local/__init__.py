"""Local training: replicas that train on their own, and are averaged every so many steps."""
