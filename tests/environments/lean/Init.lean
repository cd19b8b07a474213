/-
What `import Init` brings in the tests. The Lean of the package index is a compiler and kernel without its library, so
the tests have a library of their own: types and names are Lean's, since the compiler knows them by name, and what it
runs lies compiled in the package (`extern`). What a theorem there rests on is told by that kernel.
-/
prelude
set_option bootstrap.inductiveCheckResultingUniverse false
set_option genCtorIdx false
set_option genSizeOf false
set_option genInjectivity false
set_option autoImplicit false
universe u v

inductive PUnit : Sort u where
  | unit : PUnit
abbrev Unit : Type := PUnit
@[match_pattern] abbrev Unit.unit : Unit := PUnit.unit
unsafe axiom lcErased : Type
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
unsafe axiom lcProof {α : Prop} : α

inductive Eq {α : Sort u} : α → α → Prop where
  | refl (a : α) : Eq a a
inductive HEq : {α : Sort u} → α → {β : Sort u} → β → Prop where
  | refl {α : Sort u} (a : α) : HEq a a
@[reducible] def Eq.ndrec.{u1, u2} {α : Sort u2} {a : α} {motive : α → Sort u1} (m : motive a) {b : α} (h : Eq a b) :
    motive b := Eq.rec m h
@[reducible] def optParam (α : Sort u) (_ : α) : Sort u := α
def Function.const {α : Sort u} (β : Sort v) (a : α) : β → α := fun _ => a
def id {α : Sort u} (a : α) : α := a
theorem eq_of_heq {α : Sort u} {a a' : α} (h : HEq a a') : Eq a a' :=
  @HEq.rec α a (fun {β} b _ => (e : Eq α β) → Eq (@Eq.ndrec (Sort u) α (fun γ => γ) a β e) b) (fun _ => Eq.refl a)
    α a' h (Eq.refl α)
theorem heq_of_eq {α : Sort u} {a a' : α} (h : Eq a a') : HEq a a' :=
  @Eq.rec α a (fun b _ => HEq a b) (HEq.refl a) a' h

inductive True : Prop where
  | intro : True
inductive False : Prop
inductive And (a b : Prop) : Prop where
  | intro (left : a) (right : b) : And a b
inductive Nonempty (α : Sort u) : Prop where
  | intro (val : α) : Nonempty α
inductive Nat where
  | zero : Nat
  | succ (n : Nat) : Nat
inductive Bool : Type where
  | false : Bool
  | true : Bool
inductive PProd (α : Sort u) (β : Sort v) where
  | mk (fst : α) (snd : β) : PProd α β
inductive Prod (α : Type u) (β : Type v) where
  | mk (fst : α) (snd : β) : Prod α β
inductive List (α : Type u) where
  | nil : List α
  | cons (head : α) (tail : List α) : List α
inductive Option (α : Type u) where
  | none : Option α
  | some (val : α) : Option α
export Option (none some)
class Inhabited (α : Sort u) where
  default : α
instance {α : Type u} : Inhabited (List α) := ⟨.nil⟩
class OfNat (α : Type u) (_ : Nat) where
  ofNat : α
@[default_instance 100] instance instOfNatNat (n : Nat) : OfNat Nat n := ⟨n⟩
inductive String where
  | mk (bytes size : Nat)
@[extern "lean"] axiom String.append (a b : String) : String
structure Array (α : Type u) where
  toList : List α
attribute [extern "lean"] Array.toList Array.mk
def List.foldl {α β : Type} (f : α → β → α) (init : α) (xs : List β) : α := match xs with
  | .nil => init
  | .cons x xs => List.foldl f (f init x) xs
export Bool (false true)
def cond {α : Sort u} (c : Bool) (x y : α) : α := match c with
  | .true => x
  | .false => y
axiom sorryAx (α : Sort u) (synthetic : Bool) : α
axiom propext {a b : Prop} : (a → b) → (b → a) → Eq a b
axiom Classical.choice {α : Sort u} : Nonempty α → α

/-- The runtime knows the last by its number. -/
inductive IO.Error where
  | e0 | e1 | e2 | e3 | e4 | e5 | e6 | e7 | e8 | e9 | e10 | e11 | e12 | e13 | e14 | e15 | e16 | e17
  | userError (message : String)
export IO.Error (userError)
abbrev IO.userError := IO.Error.userError
inductive Lean.Name where
  | anonymous : Lean.Name
  | str (pre : Lean.Name) (str : String)
  | num (pre : Lean.Name) (i : Nat)

inductive EST.Out (ε : Type) (α : Type) where
  | ok : α → EST.Out ε α
  | error : ε → EST.Out ε α
def IO (α : Type) : Type := Unit → EST.Out IO.Error α
class Pure (f : Type u → Type v) where
  pure {α : Type u} : α → f α
class Bind (m : Type u → Type v) where
  bind {α β : Type u} : m α → (α → m β) → m β
export Pure (pure)
instance : Pure IO := ⟨fun a _ => .ok a⟩
instance : Bind IO := ⟨fun x f s => match x s with
  | .ok a => f a s
  | .error message => .error message⟩
def throw {α : Type} (error : IO.Error) : IO α := fun _ => .error error
