//! The probe's payload: a 64 KiB ROM in the place of a BIOS, assembled here.
//!
//! | where | mode | what |
//! |---|---|---|
//! | `fff0` | real | the reset vector: a jump to the start of the ROM |
//! | `0000` | real | GDT, protected mode |
//! | | 32-bit, in the ROM | copies the rest to RAM, maps 4 GiB, long mode |
//! | `10000` in RAM | 64-bit | IDT; then the steps |
//!
//! | step | instructions |
//! |---|---|
//! | 1 | `fninit`, and the status word is clear |
//! | 2 | `xsave`, `xrstor` (`fxsave`, `fxrstor` where the CPU has no XSAVE), and a register came through |
//! | 3 | `wrmsr` to LSTAR and to PAT, read back |
//! | 4 | an interrupt of the local APIC's timer |
//!
//! It reports one byte `b` on port f4: isa-debug-exit makes QEMU exit with `2b + 1`. A wrong result is `20 + step`, an
//! exception `40 + step`. Descriptors carry the accessed bit, since a ROM cannot be written.

const ROM: usize = 0x1_0000;
/// The ROM's end is the end of the 32-bit address space.
const ROM_AT: u32 = 0xffff_0000;
const PASSED: u8 = 0x2a;
/// All steps, the second by `fxsave` and `fxrstor`.
const PASSED_OLD: u8 = 0x2b;
const WRONG: u8 = 0x20;
const FAULT: u8 = 0x40;
const STEPS: [&str; 5] =
    ["entering 64-bit mode", "fninit", "xsave and xrstor", "writing a model-specific register", "a timer interrupt"];

// RAM of the payload.
const PAGE_TABLES: u32 = 0x1000; // PML4, PDPT, four page directories
const STACK: u32 = 0x9000;
const IDT: u32 = 0xa000;
const STATE: u32 = 0xb000; // XSAVE area
const FLAG: u32 = 0xc000;
const LONG: u32 = 0x1_0000; // the 64-bit part
const APIC: u32 = 0xfee0_0000;

const DATA: u16 = 0x10;
const CODE32: u16 = 0x08;
const CODE64: u16 = 0x18;
const TIMER_VECTOR: u32 = 0x40;
const PATTERN: u32 = 0x1234_5678;

/// How the payload came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// With XSAVE.
    WithXsave,
    /// The CPU model has none.
    WithoutXsave,
}

/// What QEMU's exit code means.
pub(super) fn verdict(code: i32) -> Result<Passed, String> {
    let byte = u8::try_from(code >> 1).ok().filter(|_| code & 1 == 1);
    let step = |b: u8| STEPS.get(usize::from(b)).copied().unwrap_or("an unknown step");
    match byte {
        Some(PASSED) => Ok(Passed::WithXsave),
        Some(PASSED_OLD) => Ok(Passed::WithoutXsave),
        Some(b) if b & 0xf0 == FAULT => Err(format!("an exception at {}", step(b & 0xf))),
        Some(b) if b & 0xf0 == WRONG => Err(format!("a wrong result of {}", step(b & 0xf))),
        _ => Err(format!("qemu exited with code {code}")),
    }
}

/// Bytes with labels for short jumps.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn b(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn w(&mut self, n: u16) -> &mut Self {
        self.b(&n.to_le_bytes())
    }

    fn d(&mut self, n: u32) -> &mut Self {
        self.b(&n.to_le_bytes())
    }

    fn here(&self) -> usize {
        self.0.len()
    }

    /// A jump (opcode with an 8-bit displacement) back to `target`.
    fn back(&mut self, opcode: u8, target: usize) {
        let displacement = target as i64 - (self.here() as i64 + 2);
        self.b(&[opcode, displacement as i8 as u8]);
    }

    /// A near jump (opcode with a 32-bit displacement) to a place that is not known yet.
    fn forward(&mut self, opcode: &[u8]) -> usize {
        self.b(opcode).d(0);
        self.here()
    }

    /// The place is here: `jump` is what [`Code::forward`] gave back.
    fn land(&mut self, jump: usize) {
        let displacement = (self.here() - jump) as u32;
        self.0[jump - 4..jump].copy_from_slice(&displacement.to_le_bytes());
    }
}

/// The whole ROM.
pub(super) fn rom() -> Vec<u8> {
    let long = long_mode();
    let mut c = Code::default();

    // Real mode. CS points at the ROM, so the GDT's address is an offset in it.
    c.b(&[0xfa]); // cli
    c.b(&[0x2e, 0x66, 0x0f, 0x01, 0x16]).w(0); // lgdt cs:[...]
    let gdtr_operand = c.here() - 2;
    c.b(&[0x0f, 0x20, 0xc0]); // mov eax, cr0
    c.b(&[0x0c, 0x01]); // or al, 1
    c.b(&[0x0f, 0x22, 0xc0]); // mov cr0, eax
    c.b(&[0x66, 0xea]).d(0).w(CODE32); // jmp CODE32:...
    let protected_operand = c.here() - 6;

    let gdtr = c.here();
    c.w(4 * 8 - 1).d(ROM_AT + gdtr as u32 + 6);
    for descriptor in [0u64, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x00af_9b00_0000_ffff] {
        c.b(&descriptor.to_le_bytes());
    }
    c.0[gdtr_operand..gdtr_operand + 2].copy_from_slice(&(gdtr as u16).to_le_bytes());

    // Protected mode.
    let protected = ROM_AT + c.here() as u32;
    c.0[protected_operand..protected_operand + 4].copy_from_slice(&protected.to_le_bytes());
    c.b(&[0x66, 0xb8]).w(DATA); // mov ax, DATA
    c.b(&[0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0]); // mov ds, ax; mov es, ax; mov ss, ax
    c.b(&[0xbc]).d(STACK); // mov esp, STACK
    c.b(&[0xbe]).d(0); // mov esi, long mode's bytes
    let source_operand = c.here() - 4;
    c.b(&[0xbf]).d(LONG); // mov edi, LONG
    c.b(&[0xb9]).d(long.len() as u32); // mov ecx, ...
    c.b(&[0xfc, 0xf3, 0xa4]); // cld; rep movsb
    c.b(&[0xbf]).d(PAGE_TABLES); // mov edi, PAGE_TABLES
    c.b(&[0xb9]).d(6 * 0x1000 / 4); // mov ecx, ...
    c.b(&[0x31, 0xc0, 0xf3, 0xab]); // xor eax, eax; rep stosd
    c.b(&[0xc7, 0x05]).d(PAGE_TABLES).d(PAGE_TABLES + 0x1000 + 3); // PML4[0]
    for n in 0..4 {
        c.b(&[0xc7, 0x05]).d(PAGE_TABLES + 0x1000 + 8 * n).d(PAGE_TABLES + 0x2000 + 0x1000 * n + 3); // PDPT[n]
    }
    c.b(&[0xbf]).d(PAGE_TABLES + 0x2000); // mov edi, page directories
    c.b(&[0xb9]).d(2048); // mov ecx, 4 GiB / 2 MiB
    c.b(&[0xb8]).d(0x83); // mov eax, present, writable, large
    let fill = c.here();
    c.b(&[0x89, 0x07]); // mov [edi], eax
    c.b(&[0x05]).d(0x20_0000); // add eax, 2 MiB
    c.b(&[0x83, 0xc7, 0x08]); // add edi, 8
    c.back(0xe2, fill); // loop
    c.b(&[0x0f, 0x20, 0xe0]); // mov eax, cr4
    c.b(&[0x0d]).d(0x620); // or eax, PAE | OSFXSR | OSXMMEXCPT
    c.b(&[0x0f, 0x22, 0xe0]); // mov cr4, eax
    c.b(&[0xb8]).d(PAGE_TABLES); // mov eax, PAGE_TABLES
    c.b(&[0x0f, 0x22, 0xd8]); // mov cr3, eax
    c.b(&[0xb9]).d(0xc000_0080); // mov ecx, EFER
    c.b(&[0x0f, 0x32]); // rdmsr
    c.b(&[0x0d]).d(0x100); // or eax, LME
    c.b(&[0x0f, 0x30]); // wrmsr
    c.b(&[0x0f, 0x20, 0xc0]); // mov eax, cr0
    c.b(&[0x25]).d(!0x6000_000c); // and eax, not (EM | TS | NW | CD)
    c.b(&[0x0d]).d(0x8000_0022); // or eax, PG | MP | NE
    c.b(&[0x0f, 0x22, 0xc0]); // mov cr0, eax
    c.b(&[0xea]).d(LONG).w(CODE64); // jmp CODE64:LONG

    let source = ROM_AT + c.here() as u32;
    c.0[source_operand..source_operand + 4].copy_from_slice(&source.to_le_bytes());
    c.b(&long);

    let mut rom = c.0;
    rom.resize(ROM, 0xf4);
    // The reset vector: jmp to offset 0 of this segment.
    rom[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0x00]);
    rom
}

/// The 64-bit part, to run at [`LONG`].
fn long_mode() -> Vec<u8> {
    let mut c = Code::default();
    c.b(&[0x66, 0xb8]).w(DATA); // mov ax, DATA
    c.b(&[0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0]); // mov ds, ax; mov es, ax; mov ss, ax
    c.b(&[0x48, 0xc7, 0xc4]).d(STACK); // mov rsp, STACK
    step(&mut c, 0);
    let to_main = c.forward(&[0xe9]); // jmp main

    // Exceptions: report the step.
    let fault = c.here();
    c.b(&[0x44, 0x89, 0xf8]); // mov eax, r15d
    c.b(&[0x0c, FAULT]); // or al, FAULT
    c.b(&[0xe6, 0xf4]); // out f4, al
    let halt = c.here();
    c.b(&[0xf4]); // hlt
    c.back(0xeb, halt); // jmp

    // The timer: note it, end of interrupt. rsi is the APIC.
    let timer = c.here();
    c.b(&[0xc6, 0x04, 0x25]).d(FLAG).b(&[1]); // mov byte [FLAG], 1
    c.b(&[0xc7, 0x86]).d(0xb0).d(0); // mov dword [rsi + EOI], 0
    c.b(&[0x48, 0xcf]); // iretq

    // A wrong result: report the step.
    let wrong = c.here();
    c.b(&[0x44, 0x89, 0xf8]); // mov eax, r15d
    c.b(&[0x0c, WRONG]); // or al, WRONG
    c.b(&[0xe6, 0xf4]); // out f4, al
    c.back(0xeb, halt); // jmp

    let idtr = c.here();
    c.w(0x100 * 16 - 1).d(IDT).d(0);

    c.land(to_main);
    // An interrupt gate's first two words; the upper half of the address is zero.
    let gate = |handler: usize| {
        let at = LONG + handler as u32;
        ((at & 0xffff) | (u32::from(CODE64) << 16), (at & 0xffff_0000) | 0x8e00)
    };
    let (exception, interrupt) = (gate(fault), gate(timer));
    c.b(&[0xbf]).d(IDT); // mov edi, IDT
    c.b(&[0xb9]).d(0x100); // mov ecx, 256
    let fill = c.here();
    c.b(&[0xc7, 0x07]).d(exception.0); // mov dword [rdi], ...
    c.b(&[0xc7, 0x47, 0x04]).d(exception.1); // mov dword [rdi + 4], ...
    c.b(&[0x48, 0xc7, 0x47, 0x08]).d(0); // mov qword [rdi + 8], 0
    c.b(&[0x48, 0x83, 0xc7, 0x10]); // add rdi, 16
    c.b(&[0xff, 0xc9]); // dec ecx
    c.back(0x75, fill); // jnz
    c.b(&[0xc7, 0x04, 0x25]).d(IDT + 16 * TIMER_VECTOR).d(interrupt.0); // mov dword [...], ...
    c.b(&[0x0f, 0x01, 0x1c, 0x25]).d(LONG + idtr as u32); // lidt [...]

    step(&mut c, 1);
    c.b(&[0xdb, 0xe3]); // fninit
    c.b(&[0xdf, 0xe0]); // fnstsw ax
    c.b(&[0x66, 0x85, 0xc0]); // test ax, ax
    jump_wrong(&mut c, wrong);

    step(&mut c, 2);
    c.b(&[0xb8]).d(1); // mov eax, 1
    c.b(&[0x31, 0xc9, 0x0f, 0xa2]); // xor ecx, ecx; cpuid
    c.b(&[0x41, 0xbe]).d(PASSED_OLD.into()); // mov r14d, PASSED_OLD
    c.b(&[0x0f, 0xba, 0xe1, 26]); // bt ecx, XSAVE
    let to_old = c.forward(&[0x0f, 0x83]); // jnc
    c.b(&[0x41, 0xbe]).d(PASSED.into()); // mov r14d, PASSED
    c.b(&[0x0f, 0x20, 0xe0]); // mov eax, cr4
    c.b(&[0x0d]).d(0x4_0000); // or eax, OSXSAVE
    c.b(&[0x0f, 0x22, 0xe0]); // mov cr4, eax
    c.b(&[0x31, 0xc9]); // xor ecx, ecx
    c.b(&[0x31, 0xd2]); // xor edx, edx
    c.b(&[0xb8]).d(3); // mov eax, x87 | SSE
    c.b(&[0x0f, 0x01, 0xd1]); // xsetbv
    save_and_restore(&mut c, 0x24, 0x2c, wrong); // xsave, xrstor
    let to_next = c.forward(&[0xe9]); // jmp
    c.land(to_old);
    save_and_restore(&mut c, 0x04, 0x0c, wrong); // fxsave, fxrstor
    c.land(to_next);

    step(&mut c, 3);
    c.b(&[0xb9]).d(0xc000_0082); // mov ecx, LSTAR
    c.b(&[0xb8]).d(PATTERN); // mov eax, PATTERN
    c.b(&[0x31, 0xd2, 0x0f, 0x30]); // xor edx, edx; wrmsr
    c.b(&[0x31, 0xc0, 0x0f, 0x32]); // xor eax, eax; rdmsr
    c.b(&[0x3d]).d(PATTERN); // cmp eax, PATTERN
    jump_wrong(&mut c, wrong);
    c.b(&[0xb9]).d(0x277); // mov ecx, PAT
    c.b(&[0x0f, 0x32, 0x0f, 0x30]); // rdmsr; wrmsr

    step(&mut c, 4);
    c.b(&[0xb0, 0xff, 0xe6, 0x21, 0xe6, 0xa1]); // mov al, ff; out 21, al; out a1, al
    c.b(&[0xbe]).d(APIC); // mov esi, APIC
    for (register, value) in [(0xf0, 0x1ff), (0x3e0, 0xb), (0x320, 0x2_0000 | TIMER_VECTOR), (0x380, 1_000_000)] {
        c.b(&[0xc7, 0x86]).d(register).d(value); // mov dword [rsi + ...], ...: enable, divide by 1, periodic, count
    }
    c.b(&[0xfb]); // sti
    let wait = c.here();
    c.b(&[0xf4]); // hlt
    c.b(&[0x80, 0x3c, 0x25]).d(FLAG).b(&[0]); // cmp byte [FLAG], 0
    c.back(0x74, wait); // je
    c.b(&[0x44, 0x88, 0xf0, 0xe6, 0xf4]); // mov al, r14b; out f4, al
    let end = c.here();
    c.b(&[0xf4]); // hlt
    c.back(0xeb, end); // jmp
    c.0
}

fn step(c: &mut Code, n: u32) {
    c.b(&[0x41, 0xbf]).d(n); // mov r15d, n
}

/// jnz wrong
fn jump_wrong(c: &mut Code, wrong: usize) {
    let displacement = wrong as i64 - (c.here() as i64 + 6);
    c.b(&[0x0f, 0x85]).d(displacement as i32 as u32);
}

/// Puts a pattern into xmm0, saves, clears, restores, compares. The area is zero: RAM starts so.
fn save_and_restore(c: &mut Code, save: u8, restore: u8, wrong: usize) {
    c.b(&[0xb8]).d(PATTERN); // mov eax, PATTERN
    c.b(&[0x66, 0x0f, 0x6e, 0xc0]); // movd xmm0, eax
    c.b(&[0xb8]).d(3); // mov eax, x87 | SSE
    c.b(&[0x31, 0xd2]); // xor edx, edx
    c.b(&[0x0f, 0xae, save, 0x25]).d(STATE); // save [STATE]
    c.b(&[0x66, 0x0f, 0xef, 0xc0]); // pxor xmm0, xmm0
    c.b(&[0x0f, 0xae, restore, 0x25]).d(STATE); // restore [STATE]
    c.b(&[0x66, 0x0f, 0x7e, 0xc0]); // movd eax, xmm0
    c.b(&[0x3d]).d(PATTERN); // cmp eax, PATTERN
    jump_wrong(c, wrong);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        assert_eq!(verdict(85), Ok(Passed::WithXsave));
        assert_eq!(verdict(87), Ok(Passed::WithoutXsave));
        for (code, words) in [
            (0, "code 0"),
            (1, "code 1"),
            (2 * 0x41 + 1, "an exception at fninit"),
            (2 * 0x22 + 1, "a wrong result of xsave and xrstor"),
            (2 * 0x44 + 1, "an exception at a timer interrupt"),
            (2 * 0x4f + 1, "an unknown step"),
            (-1, "code -1"),
            (84, "code 84"),
        ] {
            let e = verdict(code).err().unwrap_or_default();
            assert!(e.contains(words), "{code}: {e}");
        }
    }

    #[test]
    fn the_rom_has_its_size_and_its_reset_vector() {
        let rom = rom();
        assert_eq!(rom.len(), 0x1_0000);
        assert_eq!(rom[0xfff0], 0xe9);
        assert_eq!(rom[0], 0xfa);
    }
}
