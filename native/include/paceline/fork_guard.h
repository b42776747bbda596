/* Between the two, a fork in another thread waits (a second at most). Plain C for the shim; C++ has
   ForkGuard (fork.hpp). Nests. The thread's own fork does not wait. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

void fork_guard_enter(void);
void fork_guard_leave(void);

#ifdef __cplusplus
}
#endif
