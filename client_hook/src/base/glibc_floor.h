/* Included before everything else in every source of the hook (CMakeLists.txt): the oldest versions of libc's symbols.
 *
 * A preload that needs a newer glibc than the image has kills every process there.  So the hook needs nothing above
 * GLIBC_2.17, on whatever system it is built; tests/test_cuda_api.py checks the library.  It may not use functions that came after
 * 2.17 (stat, fstat, gettid, getrandom as functions): syscall() has them.
 */
#ifndef NVS_GLIBC_FLOOR_H
#define NVS_GLIBC_FLOOR_H

#if defined(__x86_64__)
#define NVS_GLIBC_FLOOR "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define NVS_GLIBC_FLOOR "GLIBC_2.17"
#endif
#define NVS_OLD(symbol) __asm__(".symver " #symbol "," #symbol "@" NVS_GLIBC_FLOOR);
#define NVS_OLD_AS(symbol, old) __asm__(".symver " #symbol "," #old "@" NVS_GLIBC_FLOOR);

/* Moved from libdl into libc by 2.34; the link names libdl.so.2 too, for systems where they have not moved. */
NVS_OLD(dlclose)
NVS_OLD(dlerror)
/* From libpthread likewise. */
NVS_OLD(pthread_create)
NVS_OLD(pthread_join)
NVS_OLD(pthread_detach)
NVS_OLD(pthread_once)
NVS_OLD(pthread_kill)
NVS_OLD(pthread_sigmask)
NVS_OLD(pthread_key_create)
NVS_OLD(pthread_key_delete)
NVS_OLD(pthread_getspecific)
NVS_OLD(pthread_setspecific)
NVS_OLD(pthread_mutex_trylock)
NVS_OLD(pthread_mutex_timedlock)
NVS_OLD(pthread_attr_setstacksize)
/* The names of these functions in a newer <stdlib.h> and <stdio.h>. */
NVS_OLD_AS(__isoc23_strtol, strtol)
NVS_OLD_AS(__isoc23_strtoul, strtoul)
NVS_OLD_AS(__isoc23_strtoll, strtoll)
NVS_OLD_AS(__isoc23_strtoull, strtoull)
NVS_OLD_AS(__isoc23_sscanf, sscanf)
#if defined(__x86_64__)
__asm__(".symver dladdr1,dladdr1@GLIBC_2.3.3");
__asm__(".symver dlinfo,dlinfo@GLIBC_2.3.3");
__asm__(".symver pthread_setname_np,pthread_setname_np@GLIBC_2.12");
#else
NVS_OLD(dladdr1)
NVS_OLD(dlinfo)
NVS_OLD(pthread_setname_np)
#endif

#endif
