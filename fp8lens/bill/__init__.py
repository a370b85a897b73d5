"""What a program costs: memory, work, what runs again, and what devices send."""
