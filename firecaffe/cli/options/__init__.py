"""What each command takes, a file for each; nothing here loads what trains, so help is quick."""
