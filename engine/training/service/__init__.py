"""The trainer service: sessions, their queue, the HTTP protocol and its client."""
