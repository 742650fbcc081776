#include "textflag.h"

// func fetch(p *byte, n int)
TEXT ·fetch(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

line:
	PREFETCHT0 (SI)
	ADDQ       $64, SI
	SUBQ       $64, CX
	JG         line
	RET

// func claim(p *byte, n int)
TEXT ·claim(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

line:
	BYTE $0x0F; BYTE $0x0D; BYTE $0x0E // PREFETCHW (SI), which the assembler does not know
	ADDQ      $64, SI
	SUBQ      $64, CX
	JG        line
	RET

// Multiples of x modulo the polynomial of CRC-32C, bits reversed: to carry 64
// bits over a distance of D bits takes x^(D+32) for the earlier half of 128
// bits and x^(D-32) for the later. TestFold holds them against hash/crc32.
DATA far<>+0(SB)/8, $0x00000000dcb17aa4 // 2048 bits: from one turn of the loop to the next
DATA far<>+8(SB)/8, $0x00000000b9e02b86
GLOBL far<>(SB), NOPTR|RODATA, $16
DATA three<>+0(SB)/8, $0x00000000a87ab8a8 // 1536: over three registers
DATA three<>+8(SB)/8, $0x00000000ab7aff2a
GLOBL three<>(SB), NOPTR|RODATA, $16
DATA two<>+0(SB)/8, $0x000000006992cea2 // 1024
DATA two<>+8(SB)/8, $0x000000000d3b6092
GLOBL two<>(SB), NOPTR|RODATA, $16
DATA one<>+0(SB)/8, $0x00000000740eef02 // 512
DATA one<>+8(SB)/8, $0x000000009e4addf8
GLOBL one<>(SB), NOPTR|RODATA, $16
DATA lanes<>+0(SB)/8, $0x000000001c291d04 // 384, 256 and 128: of one register onto its last lane
DATA lanes<>+8(SB)/8, $0x00000001d82c63da
DATA lanes<>+16(SB)/8, $0x00000001384aa63a
DATA lanes<>+24(SB)/8, $0x00000000ba4fc28e
DATA lanes<>+32(SB)/8, $0x00000000f20c0dfe
DATA lanes<>+40(SB)/8, $0x000000014cd00bd6
DATA lanes<>+48(SB)/8, $0
DATA lanes<>+56(SB)/8, $0
GLOBL lanes<>(SB), NOPTR|RODATA, $64

// func fold(state uint32, p *byte, n int) uint32
TEXT ·fold(SB), NOSPLIT, $0-28
	MOVL state+0(FP), AX
	MOVQ p+8(FP), SI
	MOVQ n+16(FP), CX

	VMOVD     AX, X4
	VPXORQ    (SI), Z4, Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3

	VBROADCASTI32X4 far<>(SB), Z4

	JMP next

loop:
	VPCLMULQDQ $0x00, Z4, Z0, Z5
	VPCLMULQDQ $0x00, Z4, Z1, Z6
	VPCLMULQDQ $0x00, Z4, Z2, Z7
	VPCLMULQDQ $0x00, Z4, Z3, Z8
	VPCLMULQDQ $0x11, Z4, Z0, Z0
	VPCLMULQDQ $0x11, Z4, Z1, Z1
	VPCLMULQDQ $0x11, Z4, Z2, Z2
	VPCLMULQDQ $0x11, Z4, Z3, Z3
	VPTERNLOGQ $0x96, (SI), Z5, Z0
	VPTERNLOGQ $0x96, 64(SI), Z6, Z1
	VPTERNLOGQ $0x96, 128(SI), Z7, Z2
	VPTERNLOGQ $0x96, 192(SI), Z8, Z3

next:
	ADDQ $256, SI
	SUBQ $256, CX
	JNE  loop

	// Four registers onto the last one.
	VBROADCASTI32X4 three<>(SB), Z4
	VBROADCASTI32X4 two<>(SB), Z9
	VBROADCASTI32X4 one<>(SB), Z10

	VPCLMULQDQ $0x00, Z4, Z0, Z5
	VPCLMULQDQ $0x11, Z4, Z0, Z0
	VPCLMULQDQ $0x00, Z9, Z1, Z6
	VPCLMULQDQ $0x11, Z9, Z1, Z1
	VPCLMULQDQ $0x00, Z10, Z2, Z7
	VPCLMULQDQ $0x11, Z10, Z2, Z2
	VPTERNLOGQ $0x96, Z0, Z5, Z3
	VPTERNLOGQ $0x96, Z1, Z6, Z2
	VPTERNLOGQ $0x96, Z2, Z7, Z3

	// Four lanes onto the last one, which the two multiplications leave out.
	VMOVDQU64     lanes<>(SB), Z4
	VPCLMULQDQ    $0x00, Z4, Z3, Z5
	VPCLMULQDQ    $0x11, Z4, Z3, Z6
	VPXORQ        Z5, Z6, Z5
	VEXTRACTI32X4 $3, Z3, X0
	VEXTRACTI32X4 $1, Z5, X1
	VEXTRACTI32X4 $2, Z5, X2
	VPXOR         X0, X1, X0
	VPXOR         X5, X2, X5
	VPXOR         X0, X5, X0

	// What is left is 16 bytes with the same remainder as all of them.
	VMOVQ   X0, AX
	VPEXTRQ $1, X0, BX
	VZEROUPPER
	XORQ    DX, DX
	CRC32Q  AX, DX
	CRC32Q  BX, DX
	MOVL    DX, ret+24(FP)
	RET
