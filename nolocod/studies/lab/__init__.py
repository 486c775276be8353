"""`nolocod lab`: does it learn as well as the methods that it could be replaced by?"""
