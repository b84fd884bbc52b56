"""Local training: replicas that train by themselves, and are averaged every so many steps."""
