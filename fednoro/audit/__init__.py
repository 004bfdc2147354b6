"""What each site's labels look like, told to the site itself:
federated confident learning, pages and letters.
"""
