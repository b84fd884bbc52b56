"""What moves between ranks: schedules executed, sums in shared memory, nodes kept apart."""
