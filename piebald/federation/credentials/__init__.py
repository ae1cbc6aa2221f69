"""Who is who: credentials, certificates and their expiry and revocation, signatures, and the audit log.

Nothing here sends a message.
"""
