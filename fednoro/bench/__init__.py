"""The paper's tables and figures as code:
which runs they need, how those share work, what comes out.
"""
