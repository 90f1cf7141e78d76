"""What people see: structured logs, and the reports made from the core's histories."""
