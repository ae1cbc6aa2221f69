"""Identities: credentials, certificates, their expiry and revocation, signatures, and the audit log.

The files of a party's folder belong here.  Nothing here sends a message or knows of runs.
"""
