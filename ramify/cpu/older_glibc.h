// Included first where a library is made for other machines: it asks for these functions by the version that every
// glibc of x86-64 has, and not by that of the machine it is made on, which may be newer than theirs.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@GLIBC_2.2.5");
#endif
