"""The child process that serves remote readers where they can end the process that they read from."""
