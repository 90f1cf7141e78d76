"""Questions of whoever operates a service, answered from logs or by running engines.

Who holds these blocks, since when, waiting for whom? Why did they come back late? What took how long? Each
question is a command: `inspect`, `leaks`, `timeline`. What they conclude is pure: records and answers go in, findings
come out.
"""
