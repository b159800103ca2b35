// For wheels (EBB_MANYLINUX): lets libraries that are linked on a newer Linux load with glibc 2.28.
//
// Note [Wheels for older systems]
// glibc 2.34 moved functions of libpthread, libdl and librt into libc, under new versions, and kept
// the old versions. The linker takes the newest version, which an older glibc lacks. So each
// function below is defined here, hidden, and jumps to the old version; a library that contains
// this file refers to no newer one. Nothing else changes: both versions name the same code.
// libstdc++'s `condition_variable::wait` has an old version for the same reason.
//
// `make wheel` fails if auditwheel finds a version that glibc 2.28 lacks, and names the symbol: add
// it here, with the newest version up to 2.28 that `objdump -T` shows in libc.so.6.
#ifndef __x86_64__
#error "EBB_MANYLINUX: the versions below are those of x86_64"
#endif

.macro older name, version
  .symver old_\name, \name@\version
  .globl \name
  .hidden \name
  .type \name, @function
  .p2align 4
\name:
  .cfi_startproc
  endbr64
  jmp *old_\name@GOTPCREL(%rip)
  .cfi_endproc
  .size \name, . - \name
.endm

.text
older dladdr, GLIBC_2.2.5
older dlopen, GLIBC_2.2.5
older dlsym, GLIBC_2.2.5
older pthread_create, GLIBC_2.2.5
older pthread_join, GLIBC_2.2.5
older pthread_mutex_trylock, GLIBC_2.2.5
older pthread_once, GLIBC_2.2.5
older pthread_sigmask, GLIBC_2.2.5
older _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, GLIBCXX_3.4.11

#ifdef EBB_CUDA_RUNTIME
older dlclose, GLIBC_2.2.5
older dlerror, GLIBC_2.2.5
older dlmopen, GLIBC_2.3.4
older dlvsym, GLIBC_2.2.5
older pthread_condattr_setpshared, GLIBC_2.2.5
older pthread_detach, GLIBC_2.2.5
older pthread_getspecific, GLIBC_2.2.5
older pthread_key_create, GLIBC_2.2.5
older pthread_key_delete, GLIBC_2.2.5
older pthread_kill, GLIBC_2.2.5
older pthread_mutexattr_destroy, GLIBC_2.2.5
older pthread_mutexattr_init, GLIBC_2.2.5
older pthread_mutexattr_setpshared, GLIBC_2.2.5
older pthread_mutexattr_settype, GLIBC_2.2.5
older pthread_rwlock_destroy, GLIBC_2.2.5
older pthread_rwlock_init, GLIBC_2.2.5
older pthread_rwlock_rdlock, GLIBC_2.2.5
older pthread_rwlock_timedrdlock, GLIBC_2.2.5
older pthread_rwlock_timedwrlock, GLIBC_2.2.5
older pthread_rwlock_tryrdlock, GLIBC_2.2.5
older pthread_rwlock_trywrlock, GLIBC_2.2.5
older pthread_rwlock_unlock, GLIBC_2.2.5
older pthread_rwlock_wrlock, GLIBC_2.2.5
older pthread_rwlockattr_destroy, GLIBC_2.2.5
older pthread_rwlockattr_init, GLIBC_2.2.5
older pthread_rwlockattr_setpshared, GLIBC_2.2.5
older pthread_setspecific, GLIBC_2.2.5
older pthread_spin_destroy, GLIBC_2.2.5
older pthread_spin_init, GLIBC_2.2.5
older pthread_spin_lock, GLIBC_2.2.5
older pthread_spin_trylock, GLIBC_2.2.5
older pthread_spin_unlock, GLIBC_2.2.5
older sem_destroy, GLIBC_2.2.5
older sem_init, GLIBC_2.2.5
older sem_post, GLIBC_2.2.5
older sem_timedwait, GLIBC_2.2.5
older sem_trywait, GLIBC_2.2.5
older sem_wait, GLIBC_2.2.5
older shm_open, GLIBC_2.2.5
older shm_unlink, GLIBC_2.2.5
#endif

// libstdc++ reads this byte to use cheaper counts of shared_ptr while there is one thread. glibc has
// it from 2.32 on. 0 is right with any number of threads.
.section .rodata
.globl __libc_single_threaded
.hidden __libc_single_threaded
.type __libc_single_threaded, @object
.size __libc_single_threaded, 1
__libc_single_threaded:
  .byte 0

.section .note.GNU-stack, "", @progbits
