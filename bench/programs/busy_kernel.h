/* A kernel that takes as long as it is told, in PTX: `nvs_busy`, which the simulated GPU knows too (there its parameter alone says how long).
 *
 * Non-goals: launching it.
 */
#ifndef NVSHARE_BENCH_BUSY_KERNEL_H
#define NVSHARE_BENCH_BUSY_KERNEL_H

#define PTX_HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"
/* .param: nanoseconds */
#define PTX_BUSY                                                                                     \
    ".visible .entry nvs_busy(.param .u64 duration)\n{\n"                                            \
    "  .reg .u64 %t<4>;\n  .reg .pred %p<2>;\n"                                                      \
    "  ld.param.u64 %t1, [duration];\n  mov.u64 %t2, %globaltimer;\n  add.u64 %t2, %t2, %t1;\n"      \
    "again:\n  mov.u64 %t3, %globaltimer;\n  setp.lt.u64 %p1, %t3, %t2;\n  @%p1 bra again;\n  ret;\n}\n"

#endif
