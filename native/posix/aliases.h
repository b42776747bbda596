/* Another name of a hook in the same file. On 64-bit systems the names with 64 at the end mean the same
   as those without; only their declarations differ, so the assembler makes them. */
#pragma once

#define ALIAS(name, hook) \
  __asm__(".globl " #name "\n.type " #name ", @function\n.set " #name ", " #hook);
